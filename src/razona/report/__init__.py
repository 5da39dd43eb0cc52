"""What a finished run says about itself."""
