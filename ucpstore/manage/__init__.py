"""What is done with a store beside saving and loading: look into it, check it, delete from it."""
