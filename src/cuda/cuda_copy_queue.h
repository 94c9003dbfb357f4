// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "copy_queue.h"

namespace tiledattn::cuda {

/// A stream of copies to this device, which is current. The first one for a device takes some
/// milliseconds and, meanwhile, some of its memory: what is fastest there is measured now and not
/// by copy(), since no memory may be taken after an object is made.
std::unique_ptr<CopyQueue> make_copy_queue(int device);

}  // namespace tiledattn::cuda
