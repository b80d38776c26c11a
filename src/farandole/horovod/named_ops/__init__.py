"""Operations that ranks submit in any order, matched by name."""
