// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "tiledattn/workspace.h"

namespace tiledattn {

/// The workspace of one-shot calls that bring none: one for each CPU thread, each (device, stream),
/// each graph capture.
std::shared_ptr<Workspace> default_workspace(Device device, const Stream& stream);

}  // namespace tiledattn
