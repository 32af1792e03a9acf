"""Storage formats: how many bytes a vector takes (`spec`, no torch) and the codecs that make them."""
