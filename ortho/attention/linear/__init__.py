"""Linear attention: feature maps, the factored product, FAVOR+ and its kin."""
