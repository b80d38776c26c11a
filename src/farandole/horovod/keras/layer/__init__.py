"""Optimizer, callbacks and loading: for Keras 3 on TensorFlow, torch and JAX, and for tf_keras."""
