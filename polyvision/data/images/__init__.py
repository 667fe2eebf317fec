"""Image sets, decoding, augmentation."""
