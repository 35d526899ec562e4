#include "bindings/daemon/errors.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace {

const char* class_name(kv::Code code) {
  switch (code) {
    case kv::Code::InvalidArgument: return "InvalidArgument";
    case kv::Code::NotFound:
    case kv::Code::LayoutLost: return "NotFound";
    case kv::Code::NoSpace: return "NoSpace";
    case kv::Code::IncompatibleVersion: return "IncompatibleVersion";
    case kv::Code::Integrity: return "IntegrityError";
    case kv::Code::Fenced: return "Fenced";
    case kv::Code::BlockLost: return "BlockLost";
    case kv::Code::DeadlineExceeded: return "DeadlineExceeded";
    default: return "FailedPrecondition";
  }
}

}  // namespace

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const kv::Error& error) {
      nb::object type = nb::module_::import_("kvstored.errors").attr(class_name(error.code));
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}
