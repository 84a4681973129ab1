"""SGLang on the packed INT2 latent cache: a plugin, its launcher and the capacity planner."""
