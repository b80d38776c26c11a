"""What codecs send: messages, sums made of messages, and a simulator without a wire."""
