"""What ``farandole verify`` looks at in trainings with TensorFlow and Keras."""
