from .values import tokens_input as tokens_input
