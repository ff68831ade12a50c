"""Arrays of any library in, results of the caller's kind out."""
