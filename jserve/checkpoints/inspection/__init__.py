"""What ``jserve inspect`` looks at and says, whether or not the model is known."""
