"""Load this folder through Transformers' Auto classes; needs `pip install hf_linear_attn`."""

import transformers

from hf_linear_attn.patching.checkpoint import linear_attention_class

LlamaForCausalLM = linear_attention_class(transformers.LlamaForCausalLM)
LlamaForQuestionAnswering = linear_attention_class(transformers.LlamaForQuestionAnswering)
LlamaForSequenceClassification = linear_attention_class(transformers.LlamaForSequenceClassification)
LlamaForTokenClassification = linear_attention_class(transformers.LlamaForTokenClassification)
LlamaModel = linear_attention_class(transformers.LlamaModel)
