// SPDX-License-Identifier: Apache-2.0
#include "xla_call.h"

#include <sstream>

#include "tiledattn/error.h"

namespace tiledattn::binding {

namespace {

DType dtype_of(xla::DataType dtype, const std::string& name) {
  switch (dtype) {
    case xla::DataType::s8:
      return DType::int8;
    case xla::DataType::s32:
      return DType::int32;
    case xla::DataType::s64:
      return DType::int64;
    case xla::DataType::f16:
      return DType::float16;
    case xla::DataType::f32:
      return DType::float32;
    case xla::DataType::bf16:
      return DType::bfloat16;
    case xla::DataType::f8e4m3fn:
      return DType::float8_e4m3fn;
    default:
      throw TypeError(
          name + ": got elements of XLA's type " + std::to_string(static_cast<int>(dtype)) +
          "; expected bfloat16, float16 or float32 (a cache: float8_e4m3fn and int8 too, "
          "indices: int32 or int64)");
  }
}

void check(xla::Error* error, const char* what) {
  if (error) throw Error(std::string("XLA gave no ") + what);
}

}  // namespace

XlaCall::XlaCall(const xla::CallFrame& frame, DeviceKind device) : frame_(frame) {
  device_.kind = device;
  if (!device_.is_cpu()) {
    xla::StreamGetArgs stream{sizeof(xla::StreamGetArgs), nullptr, frame.context, nullptr};
    check(frame.api->get_stream(&stream), "stream");
    stream_.handle = stream.stream;
    xla::DeviceOrdinalGetArgs ordinal{sizeof(xla::DeviceOrdinalGetArgs), nullptr, frame.context, 0};
    check(frame.api->get_device_ordinal(&ordinal), "device ordinal");
    device_.index = ordinal.ordinal;
  }
  operands_ = named("operands", frame.arguments);
  results_ = named("results", frame.results);
  const Named& first = results_.at(0);
  if (first.buffer->rank < first.rank) throw Error(first.name + ": XLA gave too few dimensions");
  outer_shape_.assign(first.buffer->dims, first.buffer->dims + (first.buffer->rank - first.rank));
  for (const std::int64_t size : outer_shape_) num_problems_ *= size;
}

std::vector<XlaCall::Named> XlaCall::named(const char* attribute,
                                           const xla::Buffers& buffers) const {
  std::istringstream words(text(attribute));
  std::vector<Named> result;
  std::string word;
  for (std::int64_t i = 0; i < buffers.size && words >> word; ++i) {
    const std::size_t colon = word.find(':');
    if (buffers.types[i] != xla::kBufferArgument) throw Error(word + ": XLA gave no buffer");
    result.push_back({word.substr(0, colon), std::stoi(word.substr(colon + 1)),
                      static_cast<const xla::Buffer*>(buffers.buffers[i])});
  }
  return result;
}

Tensor XlaCall::tensor(const Named& named, std::int64_t problem) const {
  const xla::Buffer& buffer = *named.buffer;
  const std::int64_t outer_rank = buffer.rank - named.rank;
  if (named.rank > Tensor::kMaxRank ||
      outer_rank != static_cast<std::int64_t>(outer_shape_.size())) {
    throw ValueError(named.name + ": got " + std::to_string(buffer.rank) +
                     " dimensions; expected " +
                     std::to_string(named.rank + static_cast<std::int64_t>(outer_shape_.size())));
  }
  Tensor tensor;
  tensor.dtype = dtype_of(buffer.dtype, named.name);
  tensor.device = device_;
  tensor.rank = named.rank;
  std::int64_t stride = 1;
  for (int i = named.rank - 1; i >= 0; --i) {
    tensor.shape[i] = buffer.dims[outer_rank + i];
    tensor.strides[i] = stride;
    stride *= tensor.shape[i];
  }
  std::int64_t offset = 0;
  for (std::int64_t i = outer_rank - 1; i >= 0; --i) {
    const std::int64_t size = outer_shape_[static_cast<std::size_t>(i)];
    if (buffer.dims[i] != 1) offset += problem % size * stride;
    problem /= size;
    stride *= buffer.dims[i];
  }
  tensor.data = static_cast<char*>(buffer.data) + offset * item_bytes(tensor.dtype);
  return tensor;
}

std::optional<Tensor> XlaCall::optional_operand(std::string_view name, std::int64_t problem) const {
  for (const Named& operand : operands_) {
    if (operand.name == name) return tensor(operand, problem);
  }
  return std::nullopt;
}

Tensor XlaCall::operand(std::string_view name, std::int64_t problem) const {
  const std::optional<Tensor> found = optional_operand(name, problem);
  if (!found) throw Error("XLA gave no operand " + std::string(name));
  return *found;
}

Tensor XlaCall::result(std::string_view name, std::int64_t problem) const {
  for (const Named& result : results_) {
    if (result.name == name) return tensor(result, problem);
  }
  throw Error("XLA gave no result " + std::string(name));
}

const void* XlaCall::attribute(std::string_view name, std::int32_t type) const {
  const xla::Attributes& all = frame_.attributes;
  for (std::int64_t i = 0; i < all.size; ++i) {
    if (std::string_view(all.names[i]->data, all.names[i]->size) != name) continue;
    if (all.types[i] != type) throw TypeError(std::string(name) + ": an attribute of another kind");
    return all.values[i];
  }
  return nullptr;
}

std::optional<double> XlaCall::number(std::string_view name) const {
  const auto* scalar = static_cast<const xla::Scalar*>(attribute(name, xla::kScalarAttribute));
  if (!scalar) return std::nullopt;
  if (scalar->dtype == xla::DataType::f64) return *static_cast<const double*>(scalar->value);
  if (scalar->dtype == xla::DataType::f32) return *static_cast<const float*>(scalar->value);
  throw TypeError(std::string(name) + ": expected a float");
}

std::optional<std::int64_t> XlaCall::integer(std::string_view name) const {
  const auto* scalar = static_cast<const xla::Scalar*>(attribute(name, xla::kScalarAttribute));
  if (!scalar) return std::nullopt;
  if (scalar->dtype == xla::DataType::s64) return *static_cast<const std::int64_t*>(scalar->value);
  if (scalar->dtype == xla::DataType::s32) return *static_cast<const std::int32_t*>(scalar->value);
  if (scalar->dtype == xla::DataType::pred) return *static_cast<const bool*>(scalar->value);
  throw TypeError(std::string(name) + ": expected an int");
}

std::string XlaCall::text(std::string_view name) const {
  const auto* span = static_cast<const xla::ByteSpan*>(attribute(name, xla::kStringAttribute));
  return span ? std::string(span->data, span->size) : std::string();
}

xla::Error* xla_error(const xla::Api& api) {
  const auto make = [&](xla::ErrorCode code, const char* message) {
    xla::ErrorCreateArgs args{sizeof(xla::ErrorCreateArgs), nullptr, message, code};
    return api.create_error(&args);
  };
  try {
    throw;
  } catch (const IndexError& error) {
    return make(xla::ErrorCode::out_of_range, error.what());
  } catch (const MemoryError& error) {
    return make(xla::ErrorCode::resource_exhausted, error.what());
  } catch (const TypeError& error) {
    return make(xla::ErrorCode::invalid_argument, error.what());
  } catch (const ValueError& error) {
    return make(xla::ErrorCode::invalid_argument, error.what());
  } catch (const std::exception& error) {
    return make(xla::ErrorCode::internal, error.what());
  }
}

bool answer_metadata(const xla::CallFrame& frame) {
  if (!frame.extensions || frame.extensions->type != xla::kMetadataExtension) return false;
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.version.major = xla::kMajorVersion;
  metadata.version.minor = xla::kMinorVersion;
  metadata.traits = 0;
  return true;
}

}  // namespace tiledattn::binding
