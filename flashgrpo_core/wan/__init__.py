"""What is Wan-specific: detecting and loading the networks, text embeddings, LoRA names."""
