// One TensorFlow operation, `FarandoleExchange`: it hands its inputs to a thread of Python and returns at once; the
// outputs are there when that thread says so. No thread of TensorFlow waits for another rank.
//
// Written against TensorFlow's C API, whose functions are declared here as far as they are used, so that no header of
// TensorFlow is needed, and the library does not depend on its C++ classes. `call.py` compiles and loads it.
//
// An operation with `in_place` has outputs like its inputs, and holds what is to be exchanged in the outputs already
// when Python sees it: in the memory of the inputs, where nobody else uses that, else in a copy. The other ones get
// outputs when their results, and so their shapes, are known.
//
// The first input is a number of the world (a variable of Python): so nothing that goes in is constant, and no
// optimizer of graphs runs the operation once and keeps its result. Each operation has its own number `call`, so two
// with the same inputs are not merged either.
//
// A second operation, `FarandoleClock`, is for the records: it notes when it runs, which is when its inputs are there,
// and how many rows the first one has. Its output is the first input: optimizers of graphs drop what has no output
// that is used.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

extern "C" {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
typedef struct { const char* data; size_t len; } TF_StringView;

TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, int code, const char* text);
int TF_GetCode(const TF_Status*);

void TF_DeleteTensor(TF_Tensor*);
int TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int);
size_t TF_TensorByteSize(const TF_Tensor*);
void* TF_TensorData(const TF_Tensor*);
size_t TF_DataTypeSize(int dtype);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(
    TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*));
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);

TF_KernelBuilder* TF_NewAsyncKernelBuilder(
    const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
    void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*destroy)(void*));
TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device,
                                      void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
void TF_KernelBuilder_HostMemory(TF_KernelBuilder*, const char* argument);
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);

void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*);
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*);
TF_StringView TF_OpKernelConstruction_GetName(TF_OpKernelConstruction*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);

int TF_NumInputs(TF_OpKernelContext*);
void TF_GetInput(TF_OpKernelContext*, int, TF_Tensor**, TF_Status*);
void TF_SetOutput(TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, int dtype, const int64_t* dims, int dim_count,
                             size_t nbytes, TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* candidates, int candidate_count,
                                           int output, const int64_t* dims, int dim_count, int* forwarded,
                                           TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);

}  // extern "C"

namespace {

struct Kernel {
  int64_t call = 0;
  unsigned char in_place = 0;
  std::string name;
};

struct Call {
  TF_OpKernelContext* context;
  std::function<void()> done;
  int64_t call;
  int64_t generation;
  std::string name;  // a copy: the kernel may be gone when a graph is
  std::vector<TF_Tensor*> tensors;  // what is exchanged
  std::vector<TF_Tensor*> outputs;

  void end() {
    for (TF_Tensor* each : tensors) TF_DeleteTensor(each);
    for (TF_Tensor* each : outputs) TF_DeleteTensor(each);
    auto last = std::move(done);
    delete this;
    last();  // the context may be gone when this returns
  }
};

// Never destroyed: the thread may wait in here while the process ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable filled;
  std::deque<std::pair<Call*, int64_t>> items;  // a call that begins, or the number of one whose result is there
};

Queue& queue() {
  static Queue* made = new Queue;
  return *made;
}

void put(Call* call, int64_t number) {
  Queue& all = queue();
  {
    std::lock_guard<std::mutex> held(all.mutex);
    all.items.emplace_back(call, number);
  }
  all.filled.notify_one();
}

void* create(TF_OpKernelConstruction* construction) {
  Kernel* kernel = new Kernel;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "call", &kernel->call, status);
  if (TF_GetCode(status) == 0)
    TF_OpKernelConstruction_GetAttrBool(construction, "in_place", &kernel->in_place, status);
  TF_StringView name = TF_OpKernelConstruction_GetName(construction);
  kernel->name.assign(name.data, name.len);
  if (TF_GetCode(status) != 0) TF_OpKernelConstruction_Failure(construction, status);
  TF_DeleteStatus(status);
  return kernel;
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

bool take_generation(TF_OpKernelContext* context, int64_t* generation, TF_Status* status) {
  TF_Tensor* first = nullptr;
  TF_GetInput(context, 0, &first, status);
  if (TF_GetCode(status) != 0) return false;
  std::memcpy(generation, TF_TensorData(first), sizeof *generation);
  TF_DeleteTensor(first);
  return true;
}

// Make the output that stands for input `i`, with its numbers in it, and append it to `tensors`.
bool take_over(TF_OpKernelContext* context, int i, std::vector<TF_Tensor*>& tensors, TF_Status* status) {
  TF_Tensor* input = nullptr;
  TF_GetInput(context, i, &input, status);
  if (TF_GetCode(status) != 0) return false;
  std::vector<int64_t> dims(TF_NumDims(input));
  for (size_t axis = 0; axis < dims.size(); ++axis) dims[axis] = TF_Dim(input, static_cast<int>(axis));
  const void* data = TF_TensorData(input);
  const size_t nbytes = TF_TensorByteSize(input);
  // A second reference to the memory would keep TensorFlow from handing it on.
  TF_DeleteTensor(input);
  int forwarded = -1;
  TF_Tensor* output = TF_ForwardInputOrAllocateOutput(context, &i, 1, i - 1, dims.data(),
                                                      static_cast<int>(dims.size()), &forwarded, status);
  if (TF_GetCode(status) != 0) return false;
  if (nbytes && TF_TensorData(output) != data) std::memcpy(TF_TensorData(output), data, nbytes);
  tensors.push_back(output);
  return true;
}

void compute(void* given, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* given_done) {
  const Kernel* kernel = static_cast<Kernel*>(given);
  // TensorFlow passes the address of a function on its stack.
  Call* call = new Call{context, std::move(*reinterpret_cast<std::function<void()>*>(given_done)),
                        kernel->call, 0, kernel->name, {}, {}};
  TF_Status* status = TF_NewStatus();
  bool good = take_generation(context, &call->generation, status);
  for (int i = 1; good && i < TF_NumInputs(context); ++i) {
    if (kernel->in_place) {
      good = take_over(context, i, call->tensors, status);
    } else {
      TF_Tensor* input = nullptr;
      TF_GetInput(context, i, &input, status);
      good = TF_GetCode(status) == 0;
      if (good) call->tensors.push_back(input);
    }
  }
  if (!good) TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
  if (good) {
    put(call, 0);
  } else {
    call->end();
  }
}

// What clocks have noted, until Python takes it: the oldest are dropped when it does not.
struct Noted {
  int64_t call, place, nanoseconds, rows;
};

constexpr size_t most_noted = 4096;

struct Notes {
  std::mutex mutex;
  std::deque<Noted> items;
};

Notes& notes() {
  static Notes* made = new Notes;
  return *made;
}

struct Clock {
  int64_t call = 0;
  int64_t place = 0;
};

void* create_clock(TF_OpKernelConstruction* construction) {
  Clock* clock = new Clock;
  TF_Status* status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "call", &clock->call, status);
  if (TF_GetCode(status) == 0)
    TF_OpKernelConstruction_GetAttrInt64(construction, "place", &clock->place, status);
  if (TF_GetCode(status) != 0) TF_OpKernelConstruction_Failure(construction, status);
  TF_DeleteStatus(status);
  return clock;
}

void destroy_clock(void* clock) { delete static_cast<Clock*>(clock); }

void read_clock(void* given, TF_OpKernelContext* context) {
  const Clock* clock = static_cast<const Clock*>(given);
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);  // that of Python's time.monotonic
  TF_Status* status = TF_NewStatus();
  TF_Tensor* input = nullptr;
  int64_t rows = 0;
  TF_GetInput(context, 0, &input, status);
  if (TF_GetCode(status) == 0) {
    rows = TF_NumDims(input) ? TF_Dim(input, 0) : 0;
    TF_SetOutput(context, 0, input, status);
    TF_DeleteTensor(input);
  }
  if (TF_GetCode(status) != 0) TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
  Notes& all = notes();
  std::lock_guard<std::mutex> held(all.mutex);
  if (all.items.size() >= most_noted) all.items.pop_front();
  all.items.push_back({clock->call, clock->place, now.tv_sec * INT64_C(1000000000) + now.tv_nsec, rows});
}

void leave_shapes_unknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);  // Python says what is known
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// Wait for the next event. Returns the call that begins, or null: then `number` is that of a result (-1: end).
EXPORTED Call* farandole_next(int64_t* number) {
  Queue& all = queue();
  std::unique_lock<std::mutex> held(all.mutex);
  all.filled.wait(held, [&all] { return !all.items.empty(); });
  std::pair<Call*, int64_t> item = all.items.front();
  all.items.pop_front();
  *number = item.second;
  return item.first;
}

// Let the thread in `farandole_next` return with `number`.
EXPORTED void farandole_post(int64_t number) { put(nullptr, number); }

// What is asked for: fills in `call` and `generation`; returns the number of tensors.
EXPORTED int farandole_look(const Call* call, int64_t* number, int64_t* generation, const char** name) {
  *number = call->call;
  *generation = call->generation;
  *name = call->name.c_str();
  return static_cast<int>(call->tensors.size());
}

// Tensor `i`: fills in `about` with its type, number of dimensions, bytes, and up to `room` dimensions.
EXPORTED void* farandole_tensor(const Call* call, int i, int64_t* about, int room) {
  const TF_Tensor* tensor = call->tensors[i];
  const int dims = TF_NumDims(tensor);
  about[0] = TF_TensorType(tensor);
  about[1] = dims;
  about[2] = static_cast<int64_t>(TF_TensorByteSize(tensor));
  for (int axis = 0; axis < dims && axis < room; ++axis) about[3 + axis] = TF_Dim(tensor, axis);
  return TF_TensorData(tensor);
}

// Make output `i` and return its memory; null when there is none to be had.
EXPORTED void* farandole_output(Call* call, int i, int dtype, const int64_t* dims, int dim_count) {
  size_t nbytes = TF_DataTypeSize(dtype);
  for (int axis = 0; axis < dim_count; ++axis) nbytes *= static_cast<size_t>(dims[axis]);
  TF_Status* status = TF_NewStatus();
  TF_Tensor* made = TF_AllocateOutput(call->context, i, dtype, dims, dim_count, nbytes, status);
  const bool good = TF_GetCode(status) == 0;
  TF_DeleteStatus(status);
  if (!good) return nullptr;
  call->outputs.push_back(made);
  return TF_TensorData(made);
}

// The outputs are complete.
EXPORTED void farandole_finish(Call* call) { call->end(); }

// Take up to `room` notes of clocks, the oldest first: four numbers each. Returns how many.
EXPORTED int farandole_clocks(int64_t* into, int room) {
  Notes& all = notes();
  std::lock_guard<std::mutex> held(all.mutex);
  int count = 0;
  for (; count < room && !all.items.empty(); ++count) {
    std::memcpy(into + 4 * count, &all.items.front(), sizeof(Noted));
    all.items.pop_front();
  }
  return count;
}

// It failed: `code` is one of TensorFlow's.
EXPORTED void farandole_fail(Call* call, int code, const char* text) {
  TF_Status* status = TF_NewStatus();
  TF_SetStatus(status, code, text);
  TF_OpKernelContext_Failure(call->context, status);
  TF_DeleteStatus(status);
  call->end();
}

}  // extern "C"

namespace {

struct Registration {
  Registration() {
    TF_Status* status = TF_NewStatus();
    TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder("FarandoleExchange");
    TF_OpDefinitionBuilderAddAttr(op, "call: int");
    TF_OpDefinitionBuilderAddAttr(op, "in_place: bool");
    TF_OpDefinitionBuilderAddAttr(op, "Tin: list(type) >= 0");
    TF_OpDefinitionBuilderAddAttr(op, "Tout: list(type) >= 0");
    TF_OpDefinitionBuilderAddInput(op, "generation: int64");
    TF_OpDefinitionBuilderAddInput(op, "inputs: Tin");
    TF_OpDefinitionBuilderAddOutput(op, "outputs: Tout");
    TF_OpDefinitionBuilderSetShapeInferenceFunction(op, leave_shapes_unknown);
    TF_RegisterOpDefinition(op, status);
    for (const char* device : {"CPU", "GPU"}) {
      TF_KernelBuilder* kernel = TF_NewAsyncKernelBuilder("FarandoleExchange", device, create, compute, destroy);
      for (const char* argument : {"generation", "inputs", "outputs"})
        TF_KernelBuilder_HostMemory(kernel, argument);
      TF_RegisterKernelBuilder("FarandoleExchange", kernel, status);
    }
    TF_OpDefinitionBuilder* clock = TF_NewOpDefinitionBuilder("FarandoleClock");
    TF_OpDefinitionBuilderAddAttr(clock, "call: int");
    TF_OpDefinitionBuilderAddAttr(clock, "place: int");
    TF_OpDefinitionBuilderAddAttr(clock, "T: type");
    TF_OpDefinitionBuilderAddAttr(clock, "Tafter: list(type) >= 0");
    TF_OpDefinitionBuilderAddInput(clock, "input: T");
    TF_OpDefinitionBuilderAddInput(clock, "after: Tafter");
    TF_OpDefinitionBuilderAddOutput(clock, "same: T");
    TF_OpDefinitionBuilderSetShapeInferenceFunction(clock, leave_shapes_unknown);
    TF_RegisterOpDefinition(clock, status);
    TF_RegisterKernelBuilder(
        "FarandoleClock", TF_NewKernelBuilder("FarandoleClock", "CPU", create_clock, read_clock, destroy_clock),
        status);
    TF_DeleteStatus(status);
  }
};

const Registration registration;

}  // namespace
