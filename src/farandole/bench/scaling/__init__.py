"""``farandole bench scaling``: a user's script at several sizes."""
