"""Lower precision, without a change of the loop: plan keys ``precision`` and ``bf16_parameters``."""
