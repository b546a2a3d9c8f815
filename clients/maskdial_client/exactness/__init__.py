"""Whether a server answers a request alike, whatever else it does: ``maskdial exactness URL``.

The same questions are asked alone and again, in company, beside cancelled ones, with a cold prefix
and a warm one, streamed, with seeds, under a schema and in batches, of any server that speaks
OpenAI's API, and those for vectors and labels of ours and of text-embeddings-inference.
"""
