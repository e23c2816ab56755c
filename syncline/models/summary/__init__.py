"""What a network is made of: its layers, with shapes, parameters, memory and work, drawn as text or as an image."""
