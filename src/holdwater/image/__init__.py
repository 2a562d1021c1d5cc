"""Images that sandboxes start from: recipes, layers, and the engines that assemble images from them."""
