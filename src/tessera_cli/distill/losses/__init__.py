"""From a batch's hidden states to a loss and its gradients."""
