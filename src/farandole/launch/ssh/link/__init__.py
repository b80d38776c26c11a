"""The pipe between the launcher and one host: frames, handshake, heartbeat, and how it ends."""
