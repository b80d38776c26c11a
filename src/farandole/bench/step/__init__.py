"""``farandole bench step``: training steps beside the rivals'."""
