"""Problems with verifiable rewards: where prompts come from, and how responses are scored."""
