"""What the client sides of the protocols share: request fields, reply fields, errors and retries."""
