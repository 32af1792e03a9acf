"""The release's files: which tensors they hold (`names`), reading them strictly (`read`), writing them (`write`)."""
