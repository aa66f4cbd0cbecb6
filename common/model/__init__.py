"""What a decoder is: names and shapes of its weights, and Hugging Face model directories."""
