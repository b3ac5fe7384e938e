"""HTTP gateway: OpenAI, Text Embeddings Inference and rerank over gRPC to a server.

It keeps no state, so any number of its processes can run. It needs the packages of varlen's extra `http`.
"""
