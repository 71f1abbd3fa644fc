"""nn.Modules taken to pieces and put together again: what they hold, under which names, exactly."""
