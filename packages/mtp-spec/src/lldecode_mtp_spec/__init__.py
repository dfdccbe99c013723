"""MTP speculation that does not repeat itself: what one draft step or layer has computed, the next ones reuse."""
