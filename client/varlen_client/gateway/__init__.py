"""HTTP gateway: the interfaces of OpenAI and Text Embeddings Inference, over gRPC to a server.

It keeps no state, so any number of its processes can run. It needs the packages of varlen's extra `http`.
"""
