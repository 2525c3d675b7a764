"""x86-64 CPUs: instruction sets, packed layouts, kernel templates, code generation, linking and tuning."""
