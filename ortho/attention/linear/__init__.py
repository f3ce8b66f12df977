"""Linear attention: feature maps, the product in time linear in N, FAVOR+ and its kin."""
