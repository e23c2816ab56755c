"""What happens inside one worker process."""
