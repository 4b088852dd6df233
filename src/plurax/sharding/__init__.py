"""How tensors lie on a mesh, moving them between shardings, and a function's share for a device."""
