"""Problems of every kind, whose kernels are compiled ahead and by CI."""
