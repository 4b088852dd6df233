"""A function of whole tensors becomes its share on one device."""
