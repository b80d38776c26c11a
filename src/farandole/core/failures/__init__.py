"""What failures mean: error texts of communication backends, and where ranks stand that wait."""
