// Scratch memory of one call, aligned to cache lines: a vector or tile row across two lines costs two accesses.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace longprefill {
namespace {

template <typename T>
class Buffer {
public:
    Buffer() = default;
    // Not initialized: what is read before it is written is an error of the kernel.
    explicit Buffer(int64_t size)
        : data_(static_cast<T*>(::operator new(static_cast<size_t>(size) * sizeof(T), std::align_val_t{64}))) {}

    static Buffer zeros(int64_t size) {
        Buffer made(size);
        std::memset(static_cast<void*>(made.get()), 0, static_cast<size_t>(size) * sizeof(T));
        return made;
    }

    T* get() const { return data_.get(); }
    T& operator[](int64_t i) const { return data_.get()[i]; }
    explicit operator bool() const { return data_ != nullptr; }

private:
    struct Free {
        void operator()(T* data) const { ::operator delete(data, std::align_val_t{64}); }
    };
    std::unique_ptr<T, Free> data_;
};

}  // namespace
}  // namespace longprefill
