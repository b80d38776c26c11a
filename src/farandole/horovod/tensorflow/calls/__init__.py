"""One operation of TensorFlow: run at once, or put into a graph, where a kernel in C++ hands it to the engine."""
