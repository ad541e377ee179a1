"""Files of documents become packed batches."""
