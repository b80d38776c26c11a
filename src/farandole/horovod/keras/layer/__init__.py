"""Optimizer, callbacks and loading: for Keras 3 on TensorFlow and torch, and for tf_keras."""
