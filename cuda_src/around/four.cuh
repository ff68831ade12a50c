// This header finds the rows of arrays with four axes, three of rows and one of columns, of any strides.
using i64 = long long;
using u64 = unsigned long long;

struct Four {
  i64 n[4];
};

// RowPlace is where a row, counted over the first three axes, begins in two arrays.
struct RowPlace {
  i64 first = 0, second = 0;
  bool exists;                     // the row is one of the arrays'
  bool is_first_of_second = true;  // no row before it has the same place in the second array

  DEVICE RowPlace(i64 row, const Four& extents, const Four& first_strides, const Four& second_strides) {
    for (int axis = 2; axis >= 0; --axis) {
      const i64 i = row % extents.n[axis];
      row /= extents.n[axis];
      first += i * first_strides.n[axis];
      second += i * second_strides.n[axis];
      if (i != 0 && second_strides.n[axis] == 0) is_first_of_second = false;
    }
    exists = row == 0;
  }
};
