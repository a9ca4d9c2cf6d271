"""The backward: the chains of states and cotangents, the gradients of all chunks, and their composition."""
