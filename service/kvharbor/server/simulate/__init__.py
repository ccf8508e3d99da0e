"""What an operator would have of some memory: requests at once, and waste, by how memory is given out."""
