"""What a sandbox starts from: recipes, layers, and the engines that assemble images from them."""
