"""What a load reads into which memory, and every check of a single tensor."""
