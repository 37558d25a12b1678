"""How ``bench`` shows what it found."""
