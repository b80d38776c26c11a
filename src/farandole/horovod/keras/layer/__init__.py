"""Optimizer, callbacks, loading and watched `fit`: for Keras 3 on TensorFlow and torch, and for tf_keras."""
