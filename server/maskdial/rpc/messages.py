"""The messages of the open inference protocol (KServe's ``grpc_predict_v2.proto``)."""

from collections.abc import Mapping

from maskdial.rpc.schema import Fields, Schema

SERVICE = "inference.GRPCInferenceService"

_PARAMETERS = "*ParametersEntry"
_FIELDS: Mapping[str, Fields] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {
        "name": (1, "string"),
        "version": (2, "string"),
        "extensions": (3, "*string"),
    },
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "*string"),
        "platform": (3, "string"),
        "inputs": (4, "*TensorMetadata"),
        "outputs": (5, "*TensorMetadata"),
    },
    "TensorMetadata": {"name": (1, "string"), "datatype": (2, "string"), "shape": (3, "*int64")},
    "ModelConfigRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "*ConfigInput"),
        "output": (6, "*ConfigOutput"),
        "backend": (17, "string"),
        "model_transaction_policy": (19, "ModelTransactionPolicy"),
    },
    "ModelTransactionPolicy": {"decoupled": (1, "bool")},
    "ConfigInput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (4, "*int64")},
    "ConfigOutput": {"name": (1, "string"), "data_type": (2, "int32"), "dims": (3, "*int64")},
    "ModelStatisticsRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelStatisticsResponse": {"model_stats": (1, "*ModelStatistics")},
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
    },
    "InferStatistics": {
        "success": (1, "StatisticDuration"),
        "fail": (2, "StatisticDuration"),
        "queue": (3, "StatisticDuration"),
        "compute_input": (4, "StatisticDuration"),
        "compute_infer": (5, "StatisticDuration"),
        "compute_output": (6, "StatisticDuration"),
        "cache_hit": (7, "StatisticDuration"),
    },
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
    "InferParameter": {
        "bool_param": (1, "bool"),
        "int64_param": (2, "int64"),
        "string_param": (3, "string"),
        "double_param": (4, "double"),
        "uint64_param": (5, "uint64"),
    },
    "ParametersEntry": {"key": (1, "string"), "value": (2, "InferParameter")},
    "InferTensorContents": {"bytes_contents": (8, "*bytes")},
    "InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, _PARAMETERS),
        "contents": (5, "InferTensorContents"),
    },
    "InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, "*InferInputTensor"),
        "outputs": (6, "*InferRequestedOutputTensor"),
        "raw_input_contents": (7, "*bytes"),
    },
    "InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, _PARAMETERS),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, "*InferOutputTensor"),
        "raw_output_contents": (6, "*bytes"),
    },
    "ModelStreamInferResponse": {
        "error_message": (1, "string"),
        "infer_response": (2, "ModelInferResponse"),
    },
}
"""Numbers in ``contents`` are left out: models here read texts. So are the fields of Triton's
configuration that say nothing here."""

DATA_TYPES = {"TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}
"""Types of a configuration."""

SCHEMA = Schema("inference", _FIELDS, {"InferParameter": "parameter_choice"})
message, read = SCHEMA.message, SCHEMA.read
