"""What every folder shares: errors, configs, text, models, files, figures, progress, tracking."""
